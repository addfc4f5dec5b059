"""Each recipe on real agents: beside the simulator, through a kill, and with a newcomer."""
