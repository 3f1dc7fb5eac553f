"""Dense attention of order 2 and 3: all keys of a sequence."""
