"""How much one program of a kernel holds: what is larger goes by plain torch."""

MOST_REGIONS = 256  # whose scores `routes` compares
MOST_MAPS, MOST_KEYS = 512, 32768  # of a guess in `sparse`
WIDEST_TOKEN = 2048  # channels of a token in `kept`
