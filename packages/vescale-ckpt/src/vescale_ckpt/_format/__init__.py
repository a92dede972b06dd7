"""What lies in the files, as pure data; see FORMAT.md."""
