"""Chaos: real daemons under mixed clients, stops, kills, forks, cancelled calls and bad disks; every HIT is checked.

The room knows the public client and the admin calls and nothing of the store's inside, so that it runs against other
builds too. Read ``ground.py`` first: what a payload is, what a finding is.
"""
