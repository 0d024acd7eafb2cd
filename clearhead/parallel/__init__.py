"""Several processes and devices: the machine, device, DDP, FSDP, the memory that a step needs."""
