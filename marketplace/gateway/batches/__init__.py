"""Files and batches: many requests in one file, run when there is room, at a share of the usual price."""
