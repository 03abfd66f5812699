"""How often a whole payload is sent or copied if a store gives no answer, and how soon.

Each try is within the time of the store, whose client repeats single requests by itself (`deadline`).
"""

ATTEMPTS = 5
FIRST_PAUSE_S = 0.5
"""Doubles with each try: 7.5 s in all, longer than a load balancer takes to fail over."""
