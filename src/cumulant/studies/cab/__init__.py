"""`cumulant bench cab`: small tasks in which attention is used in four ways, and one leaderboard over all of them.

`patterns` says which mechanism serves which use, `backbones` and `tasks` what is trained, `data` and `synthetic` on
what, `training` one run, `study` all of them, `leaderboard` what they allow to be said.
"""
