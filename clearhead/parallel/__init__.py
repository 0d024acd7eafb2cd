"""Several processes and devices: device, DDP, FSDP, the memory that a step needs."""
