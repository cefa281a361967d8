"""Generated code of the contract in proto/kvplane/v1; `make proto` writes it."""
