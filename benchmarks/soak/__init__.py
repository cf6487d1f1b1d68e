"""A service of real processes under a mixed load and kills: every answer is compared with the same request
alone."""
