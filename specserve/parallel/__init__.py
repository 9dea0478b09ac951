"""Steps that several processes compute together. The first decides, and the others obey what it sends."""
