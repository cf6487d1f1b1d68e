"""How the suite checks annotations: by their types as pyright reads them, where an int is a float too."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
