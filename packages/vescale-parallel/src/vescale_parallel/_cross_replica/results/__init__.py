"""What calls return for parts of the rows: means, and lists with elements of each row."""
