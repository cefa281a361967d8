"""Long runs on real input, made by hand; their tables go into the notes."""
