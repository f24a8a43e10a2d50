-- Forget some objects; return whether there is more to do, and the names of pools that are done.
local left = tonumber(ARGV[1])
redis.call('ZREMRANGEBYSCORE', prefix .. 'alive', '-inf', now)
local members = redis.call('HGETALL', prefix .. 'members')
for i = 1, #members, 2 do
  local seat = unpack(cmsgpack.unpack(members[i + 1]))
  if not lives('alive', seat) then redis.call('HDEL', prefix .. 'members', members[i]) end
end
local pools = redis.call('HGETALL', prefix .. 'pools')
local answer = {0}
for i = 1, #pools, 2 do
  local pool, name = pools[i], pools[i + 1]
  if not name_of(pool) then
    local keys = redis.call('SPOP', prefix .. 'p' .. pool, left)
    local objects = named('o', keys)
    change(objects, read(objects), function(pools) return without(pool, pools) end)
    if #keys == left then
      answer[1] = 1
      return answer
    end
    left = left - #keys
    redis.call('ZREM', prefix .. 'served', pool)
    redis.call('HDEL', prefix .. 'pools', pool)
    if redis.call('HGET', prefix .. 'names', name) == pool then
      redis.call('HDEL', prefix .. 'names', name)
    end
    answer[#answer + 1] = name
  end
end
return answer
