"""Images made for training: diffusion models behind one protocol, GeNIe, and what it is compared with."""
