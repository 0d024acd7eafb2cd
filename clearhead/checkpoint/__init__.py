"""Checkpoints of a run: saving, finding and resuming.

saving.py         collects the state of all ranks, tracks the best checkpoint, and writes files on
                  rank 0 in a thread: atomic writes, links, removal of old ones
tensors.py        collects and loads parameters and optimizer state
format.py         the files of a checkpoint, their checksums, the fields of state.json
listing.py        lists the checkpoints of a run, and finds the checkpoint for a path
resume.py         from which checkpoint a run is resumed, what may change, with which command
run_directory.py  name, lock and settings files of a run directory
"""
