local pool = number_of(ARGV[1])
return pool and redis.call('SCARD', prefix .. 'p' .. pool) or 0
