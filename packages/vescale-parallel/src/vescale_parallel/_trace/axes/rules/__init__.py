"""How each operator passes named axes on."""
