-- Adds what was learned about each engine (`LearnedState` as JSON).
CREATE TABLE learned (
    target TEXT NOT NULL,
    model TEXT NOT NULL,
    engine TEXT NOT NULL,
    replica TEXT NOT NULL,
    t_s REAL NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (target, model, engine, replica)
);
