"""What moves bytes: ranks as processes or as parts of one, collectives, and their failures."""
