"""Generated Python code of the protobuf files in proto/kvplane/v1; `make proto` writes it."""
