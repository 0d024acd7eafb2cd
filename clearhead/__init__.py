"""The packages of clearhead: see the map in README.md. `clearhead.lens` is also a library."""
