"""How fast a launch is: bytes, FLOPs, links and the roofline over them. Pure."""
