"""The packages of clearhead (map: docs/architecture.md). `clearhead.lens` is also a library."""
