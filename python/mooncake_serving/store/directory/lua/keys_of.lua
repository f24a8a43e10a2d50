local pool, cursor, count = number_of(ARGV[1]), ARGV[2], ARGV[3]
if not pool then return {'0', ''} end
local page = redis.call('SSCAN', prefix .. 'p' .. pool, cursor, 'COUNT', count)
return {page[1], table.concat(page[2])}
