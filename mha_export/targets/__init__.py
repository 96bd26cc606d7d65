"""One file per target. A file that defines ``TARGET`` is found by itself."""
