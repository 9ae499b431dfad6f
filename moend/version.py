"""The version of what the engine computes."""

# Goes up by one whenever a golden record changes (tests/golden): it is a part of every cell's key, so that numbers of
# two versions never stand in one table. CHANGELOG.md says what each version changed.
ENGINE_VERSION = 2
