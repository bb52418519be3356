"""Scripts that run in a process of their own, those of a peer in its own Python: they import no
other module of quire. Each says one line of JSON when its engine is ready, its versions, build and
settings, then takes one line per job and answers with the seconds that it took."""
