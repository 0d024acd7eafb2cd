"""Checkpoints of a run: written, found and resumed.

checkpointer.py   component of a run, on all ranks: which step is saved, which one is the best
saver.py          on rank 0, in a thread: atomic writing, links, removal of old ones
tensors.py        parameters and optimizer state as tensors, and back
format.py         the files of one checkpoint, their checksums, the types in state.json
listing.py        the checkpoints of a run, and the one that a path means
resume.py         where a run starts: new, from its own checkpoint, or as a branch
run_directory.py  name, lock and settings of a run's directory
"""
