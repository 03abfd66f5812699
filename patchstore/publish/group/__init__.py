"""Publishing from many ranks: who owns what, what ranks tell each other, and one commit for all."""
