"""Operations on pages: the interface (`interface`), and the backends that carry it out."""
