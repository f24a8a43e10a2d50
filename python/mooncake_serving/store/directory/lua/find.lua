-- Which living pools have some objects, as two strings, since clients are slow to read dozens: the
-- distinct lists of names, in JSON; and 4 bytes per object, the index of its list: from 1, or 0 for
-- none.
local none = struct.pack('<I4', 0)
local lists, which, found = {}, {[false] = none}, {}

local function list_of(pools)
  local names = living_of(pools)
  if #names == 0 then return none end
  for i = 1, #names do names[i] = name_of(names[i]) end
  lists[#lists + 1] = names
  return struct.pack('<I4', #lists)
end

-- Go on with these, of a prefix up to one that no pool has: whether it goes on behind them.
local function find(said, is_prefix)
  for i = 1, #said do
    local list = which[said[i]]
    if not list then
      list = list_of(said[i])
      which[said[i]] = list
    end
    if is_prefix and list == none then return false end
    found[#found + 1] = list
  end
  return true
end

local function answer() return {cjson.encode(lists), table.concat(found)} end
