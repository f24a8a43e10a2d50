"""What the demo chats about: two notes, and questions about each."""

KITCHEN = (
    "Here is a note from a kitchen. On Monday we baked nine loaves of rye bread and sold seven. "
    "On Tuesday the oven was cold until noon, so we made soup of leeks and potatoes, and forty "
    "people ate it. On Wednesday a baker from the next town came with a sack of spelt flour, and "
    "we tried it in rolls, in a flat bread with onions and in a cake with plums. The rolls were "
    "dry, the flat bread was good, the cake was gone before it had cooled. On Thursday we wrote "
    "to the baker for three more sacks. On Friday it rained, nobody came, and we cleaned the "
    "shelves, fixed the door, sharpened all the knives and counted the jars: twelve of plum, "
    "four of quince, one of something that has lost its label. "
)
LIGHTHOUSE = (
    "Here is a page from the log of a lighthouse. At dawn the wind was from the west, the sea "
    "was grey and two trawlers lay behind the island. At nine the supply boat brought oil, "
    "flour, a new rope and the newspapers of last week. At ten the keeper painted the north "
    "rail, which had rusted since the storm in March. At noon the glass fell, and by two there "
    "was fog, so the horn was sounded every thirty seconds until the evening. At five a yacht "
    "with a torn sail asked the way to the harbour; her crew of three was tired and cold, and "
    "stayed for soup. At eight the fog was gone, the lamp was lit, and the keeper saw eleven "
    "ships pass before midnight, the last of them a tanker without a light. "
)
QUESTIONS = {
    KITCHEN: (
        "What did the kitchen try the spelt flour in?",
        "How many people ate the soup?",
        "What happened on Friday?",
        "How many loaves were sold on Monday?",
        "Who brought the flour?",
        "Which jars were counted?",
    ),
    LIGHTHOUSE: (
        "What did the supply boat bring?",
        "When was the lamp lit?",
        "Why was the horn sounded?",
        "Who stayed for soup?",
        "What did the keeper paint?",
        "How many ships passed before midnight?",
    ),
}


def about(note: str, question: int) -> str:
    """Return the message of a user: a note, and a question about it."""
    return note + QUESTIONS[note][question]
