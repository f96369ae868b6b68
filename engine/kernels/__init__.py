"""One function per hot operation: the torch reference that a Triton kernel of the same name is held to."""
