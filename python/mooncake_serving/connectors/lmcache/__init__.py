"""The store as a second level (L2) of LMCache: ``l2.StoreL2Adapter``."""
