"""The formats in which engines publish cache events, decoded into `events`."""
