"""What an ``nn.Module`` is made of: blocks, names, linear layers, copies, example inputs."""
