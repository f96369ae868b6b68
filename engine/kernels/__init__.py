"""One function per hot operation, in torch; a Triton kernel of the same name and signature may stand beside it."""
