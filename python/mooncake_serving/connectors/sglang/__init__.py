"""The store as the storage behind SGLang's HiCache: ``hicache.HiCacheStore``."""
