"""Texts of bench_semantic.py, written for it: a report, versions of it, and one on another topic.

Each is a list of paragraphs. ``QUESTION`` follows every version, and ``ANSWER`` is the text whose
perplexity is measured. ``FACTS`` are beginnings of sentences, how the report ends them, and how it
does with its words edited.
"""

REPORT = [
    "The tide mill at Carrow stands where the creek narrows before it meets the estuary. Records of"
    " the abbey mention a mill on the spot in 1173, but the present building, of brick on a base of"
    " granite, was raised in 1764 by a merchant named Josiah Penhallow. He had made his money in"
    " salted fish and wanted flour for the ships that carried it. The mill worked every day of the"
    " year, at hours set by the moon, until the spring of 1931.",
    "A tide mill needs no river. Twice a day the rising sea pushed open a pair of oak gates and"
    " filled a pond of nine acres behind the dam. When the tide turned, the weight of the water"
    " shut the gates again, and the miller waited. After about three hours the level outside had"
    " fallen far enough below the pond to drive the wheel, and he could grind for five hours before"
    " the sea came back. His working day moved forward by fifty minutes from one day to the next.",
    "Penhallow's wheel was sixteen feet across and drove four pairs of stones. Two of them were of"
    " French burr, a hard quartz that kept its edge and made the finest flour; the others were of"
    " local grit and ground barley for cattle. The gearing was of apple wood, which wears quietly"
    " and breaks before iron does. A spare set of teeth hung in the loft, each one numbered, and"
    " the miller's boys learned to replace a broken tooth within the slack of a single tide.",
    "The mill failed for a plain reason. The railway that reached the town in 1868 brought flour"
    " from steel rollers, whiter and cheaper than anything that stones could make. For sixty years"
    " the mill lived on animal feed. In 1929 a storm tore away one of the gates, and the owners,"
    " who were by then a brewery in the county town, decided that the repair would cost more than"
    " the mill could earn. The last miller, Edith Sarre, locked the door two years later.",
    "During the war the building served as a store for rope and paint. Afterwards it stood empty,"
    " and the pond silted up until sheep grazed on it. In 1974 the council bought the ruin for one"
    " pound and had plans to pull it down for a car park. A schoolteacher, Martin Oake, gathered"
    " four hundred signatures against the plan, and the council gave the mill a stay of five years."
    " The roof was made sound with sheets of tin, and nothing else was done.",
    "The restoration that was finished last autumn began in 2009 with a survey of the pond. Divers"
    " found the sill of the medieval mill three feet below the present one, with the sockets of its"
    " gates still sharp in the oak. The trust that now owns the mill decided to leave the old sill"
    " where it was and to build the new gates above it. The dredging took two winters, because the"
    " mud had to be tested for lead from the paint store before it could be spread on fields.",
    "The greatest expense was the wheel. No workshop in the country had built one of that size for"
    " a tidal site in living memory, so the trust asked a boatyard. The yard laid it out like the"
    " frames of a hull, in larch from a single wood, and fixed the paddles with bronze bolts that"
    " can be turned by hand. The wheel cost two hundred and ten thousand pounds, of which a lottery"
    " fund paid half, and three thousand people in the town gave most of the rest.",
    "Since October the mill has ground wheat again on two days of each week. It makes forty sacks"
    " in a month, which are sold to bakers within twenty miles. The trust does not expect that the"
    " flour will ever pay for the building. The income that matters comes from a turbine of eleven"
    " kilowatts, set in the second wheel pit, which runs on every tide, day and night, and which"
    " sells its current to the town. Visitors see both machines from the same gallery.",
    "The engineers are cautious about the future. The mean level of the sea at Carrow has risen by"
    " nineteen centimetres since the mill was built, and the time for which the wheel can turn has"
    " shortened by twenty minutes on each tide. If the sea goes on rising as the county expects,"
    " the wheel will stand still at spring tides by the end of the century, although the turbine,"
    " which sits lower and needs less of a fall, will go on for some decades longer.",
    "The trust has drawn one lesson from the work that it now offers to the owners of other mills."
    " It is to begin with the water and not with the walls. A building can wait under a tin roof"
    " for thirty years, but a pond that is lost to silt, or a dam that has been breached, may never"
    " be granted again under the laws that protect the shore. Carrow was lucky in its sheep, whose"
    " grazing kept the pond from becoming a wood.",
]

REWRITTEN = [
    "Carrow's tide mill is found where the creek becomes narrow, just before the estuary. The abbey"
    " wrote of a mill at this place in 1173. The building of today has brick walls on a granite"
    " base, and was put up in 1764 by Josiah Penhallow, a merchant. Salted fish had made him rich,"
    " and the ships that carried it needed flour. Until the spring of 1931 the mill worked every"
    " day of the year, at hours that the moon decided.",
    "No river is needed for a tide mill. The rising sea pushed a pair of oak gates open twice a day"
    " and filled the nine acres of pond behind the dam. As the tide turned, the water's own weight"
    " closed the gates, and then the miller had to wait. It took about three hours until the level"
    " outside was low enough, compared with the pond, for the wheel to turn. He could then grind"
    " for five hours until the sea returned. Each day his work began fifty minutes later.",
    "The wheel that Penhallow built measured sixteen feet and turned four pairs of stones. French"
    " burr, a hard quartz that stays sharp, was used for two of them and gave the finest flour;"
    " local grit was used for the rest, which ground barley for cattle. Apple wood was chosen for"
    " the gears, since it is quiet as it wears and breaks sooner than iron. In the loft hung spare"
    " teeth with numbers on them, and the miller's boys could put one in during one slack tide.",
    "Why the mill failed is easily told. In 1868 the railway came to the town, and with it flour"
    " from steel rollers, which was cheaper and whiter than what stones can make. Animal feed kept"
    " the mill alive for sixty more years. Then a storm in 1929 carried off one of the gates. The"
    " owners, by that time a brewery in the county town, thought that the repair would cost more"
    " than the mill would bring in. Two years later Edith Sarre, the last miller, locked the door.",
    "In the war, rope and paint were stored in the building. After that it was empty, while the"
    " pond filled with silt until sheep could graze there. The council bought the ruin in 1974 for"
    " a single pound, and meant to pull it down and make a car park. Martin Oake, a teacher at the"
    " school, collected four hundred signatures against this, and the council agreed to wait for"
    " five years. Sheets of tin made the roof sound, but nothing more was done.",
    "Last autumn saw the end of a restoration that had started in 2009, when the pond was surveyed."
    " Three feet beneath the present sill, divers discovered that of the medieval mill; the sockets"
    " for its gates were still sharp in the oak. The mill now belongs to a trust, which chose to"
    " leave this old sill in place and build new gates above it. Dredging lasted for two winters,"
    " as the mud might hold lead from the paint store and was tested before it went on fields.",
    "Nothing cost more than the wheel. Within living memory no workshop in the country had made one"
    " so large for the tide, and so the trust turned to a boatyard. There it was laid out as if it"
    " were the frames of a hull, with larch from one wood, and its paddles were fixed with bolts of"
    " bronze that a hand can turn. The price was two hundred and ten thousand pounds. A lottery"
    " fund gave half of it, and most of the rest came from three thousand people of the town.",
    "The mill has been grinding wheat since October, on two days a week. Bakers within twenty miles"
    " buy the forty sacks that it makes in a month. That the flour might pay for the building is"
    " not what the trust expects. What matters is the income from a turbine in the second wheel"
    " pit: it has eleven kilowatts, runs by day and by night on every tide, and its current is sold"
    " to the town. From one gallery the visitors can see both machines.",
    "About the future the engineers are careful. Since the mill was built, the sea at Carrow has"
    " risen by nineteen centimetres in the mean, and on each tide the wheel can turn for twenty"
    " minutes less. Should the sea rise as the county expects, then by the end of the century the"
    " wheel will not move at spring tides. The turbine is set lower and needs less of a fall, and"
    " so it will go on for some decades more.",
    "There is one lesson from the work that the trust now gives to the owners of other mills: start"
    " with the water, not with the walls. Under a roof of tin a building can wait for thirty years."
    " But if a pond is lost to silt, or a dam is breached, the laws that protect the shore may"
    " never again permit it. Carrow had luck with its sheep, because their grazing stopped the pond"
    " from turning into a wood.",
]

INSERTED = (
    "This copy of the report was made for the members of the harbour committee, who meet on the"
    " first Monday of the month. Figures in pounds are those of the year in which they were spent."
)

WORDS = {
    "merchant": "trader",
    "money": "fortune",
    "oak": "elm",
    "nine acres": "seven acres",
    "five hours": "four hours",
    "finest": "best",
    "storm": "gale",
    "brewery": "bank",
    "schoolteacher": "doctor",
    "four hundred": "six hundred",
    "divers": "workmen",
    "larch": "pine",
    "bronze": "steel",
    "eleven": "fifteen",
    "October": "November",
    "nineteen": "twenty-two",
    "cautious": "worried",
    "lesson": "conclusion",
    "lucky": "fortunate",
}

OTHER = [
    "Sourdough bread rises without yeast from a packet. A mixture of flour and water, left in a jar"
    " for a week and fed each morning, fills with wild yeasts and with bacteria that turn sugar"
    " into acid. The acid keeps other microbes away and gives the loaf its taste. Bakers call the"
    " mixture a starter, and some of them have kept theirs alive for decades, handing a spoonful on"
    " to each apprentice who leaves to open a shop.",
    "To make a loaf, weigh five hundred grams of strong flour into a bowl and add three hundred and"
    " fifty of warm water. Stir until no dry flour is left, cover the bowl and wait for half an"
    " hour. Then add a hundred grams of starter and ten of salt, and squeeze the dough through your"
    " fingers until it is smooth. The dough will feel wet. Resist the wish to add flour, because a"
    " stiff dough makes a dense crumb.",
    "Over the next four hours fold the dough every thirty minutes. Wet your hand, take hold of one"
    " side, stretch it upward and lay it across the rest, then turn the bowl and do the same from"
    " the other three sides. Folding lines up the strands of gluten and traps the gas. By the last"
    " fold the dough should have grown by half and should tremble when the bowl is shaken.",
    "Shape the loaf on a dry table with as little flour as you can manage. Draw the edges to the"
    " middle, turn the dough over and pull it toward you so that the skin grows tight. Put it into"
    " a basket lined with a floured cloth, and leave it in the refrigerator until the next day. The"
    " cold slows the yeast more than the bacteria, so a long night makes a sharper bread.",
    "Heat the oven as far as it will go with an iron pot inside. After forty minutes tip the loaf"
    " onto paper, cut its top with a razor at a shallow angle, and lower it into the pot. Cover the"
    " pot for the first twenty minutes, so that the steam keeps the crust soft while the bread"
    " rises, then take off the lid and bake it until it is the colour of chestnuts.",
    "The hardest part comes last. A loaf that is cut while it is hot turns to gum under the knife,"
    " since the starch has not yet set. Let it stand on a rack for two hours at the least; you will"
    " hear the crust crackle as it cools. Kept in a paper bag, cut side down on a board, the bread"
    " stays good for four days, and after that it makes the best toast of the week.",
    "If a loaf fails, the crumb says why. Large holes beneath the crust and a dense base mean that"
    " the dough did not ferment for long enough. A flat loaf with an even, sticky crumb has been"
    " left for too long. A pale crust wants a hotter oven or a longer bake, and a thick one wants"
    " more steam at the beginning. Write down the times and the temperature of the kitchen, and"
    " change one thing at a time.",
]

QUESTION = "In short, what the trust learned from the restoration is that"
ANSWER = (
    " one should begin with the water and not with the walls. The building waited for years under a"
    " tin roof, but a pond that is lost to silt may never be granted again. The wheel of larch cost"
    " two hundred and ten thousand pounds, and the turbine of eleven kilowatts sells its current to"
    " the town. As the sea rises, the wheel will stand still at spring tides by the end of the"
    " century, although the turbine will go on for some decades."
)


FACTS = [
    ("The pond behind the dam had an area of", " nine", " seven"),
    ("Before the sea came back the miller could grind for", " five", " four"),
    ("The plan to pull down the mill was opposed by Martin Oake, a", " school", " doctor"),
    ("In 1929 a gate of the mill was torn away by a", " storm", " gale"),
    ("The owners of the mill in 1929 were a", " brewery", " bank"),
    ("The paddles were fixed with bolts of", " bronze", " steel"),
    ("The new wheel was built in", " larch", " pine"),
    ("The turbine has a power of", " eleven", " fifteen"),
    ("The mill has ground wheat again since", " October", " November"),
    ("The gates that the sea pushed open were of", " oak", " elm"),
]


def join(paragraphs: list[str], question: str = QUESTION) -> str:
    """Return a prompt: paragraphs, and the question."""
    return "\n\n".join([*paragraphs, question])


def edited() -> list[str]:
    """Replace words here and there, numbers among them."""
    paragraphs = REPORT
    for old, new in WORDS.items():
        paragraphs = [paragraph.replace(old, new) for paragraph in paragraphs]
    return paragraphs


def moved() -> list[str]:
    """Put paragraphs into another order."""
    return [REPORT[i] for i in (0, 3, 4, 1, 2, 8, 5, 7, 6, 9)]


VERSIONS = {
    "a paragraph in front": [INSERTED, *REPORT],
    "words edited": edited(),
    "paragraphs moved": moved(),
    "rewritten": REWRITTEN,
}
