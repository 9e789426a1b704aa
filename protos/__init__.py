"""The wire: proto files and their generated stubs (`make protos`)."""
