from hypothesis import settings

# Two shared cores: a first call that imports scipy is slow and proves nothing.
settings.register_profile("mathematics", deadline=None, max_examples=50)
settings.load_profile("mathematics")
