"""What a module's own forward reads in place of what it would: parameters, buffers, arguments."""
