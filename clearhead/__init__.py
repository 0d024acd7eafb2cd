"""The packages of clearhead (map: docs/architecture.md)."""
