"""How fast a launch is: bytes, FLOP, links, and the roofline computed from them. Pure."""
