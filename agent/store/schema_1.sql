CREATE TABLE targets (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);

CREATE TABLE engines (
    id INTEGER PRIMARY KEY,
    target_id INTEGER NOT NULL,
    model TEXT NOT NULL,
    engine TEXT NOT NULL,
    replica TEXT NOT NULL,
    labels TEXT NOT NULL,
    first_s REAL NOT NULL,
    last_s REAL NOT NULL,
    UNIQUE (target_id, model, engine, replica)
);

CREATE TABLE layouts (id INTEGER PRIMARY KEY, names BLOB NOT NULL UNIQUE);

CREATE TABLE open_scrapes (id INTEGER PRIMARY KEY, t_s REAL NOT NULL, error TEXT);

CREATE TABLE open_signals (
    id INTEGER PRIMARY KEY, t_s REAL NOT NULL, layout_id INTEGER NOT NULL, body BLOB NOT NULL
);

CREATE TABLE open_counters (
    id INTEGER PRIMARY KEY, t_s REAL NOT NULL, layout_id INTEGER NOT NULL, body BLOB NOT NULL
);

CREATE TABLE chunks (
    id INTEGER PRIMARY KEY,
    kind INTEGER NOT NULL,
    owner_id INTEGER NOT NULL,
    step_s REAL NOT NULL,
    first_seq INTEGER NOT NULL,
    last_seq INTEGER NOT NULL,
    min_s REAL NOT NULL,
    max_s REAL NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX chunks_of_owner ON chunks (kind, owner_id, max_s, min_s);
CREATE INDEX chunks_by_age ON chunks (max_s);

CREATE TABLE documents (
    id INTEGER PRIMARY KEY,
    engine_id INTEGER NOT NULL,
    t_s REAL NOT NULL,
    base_id INTEGER,
    body BLOB NOT NULL
);
CREATE INDEX documents_of_engine ON documents (engine_id, t_s);

CREATE TABLE intervals (
    id INTEGER PRIMARY KEY,
    engine_id INTEGER NOT NULL,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    severity INTEGER NOT NULL,
    start_s REAL NOT NULL,
    end_s REAL,
    last_s REAL,
    ended TEXT NOT NULL DEFAULT ''
);
CREATE INDEX intervals_of_engine ON intervals (engine_id, end_s);

CREATE TABLE recommendations (
    id INTEGER PRIMARY KEY,
    engine_id INTEGER NOT NULL,
    name TEXT NOT NULL,
    document BLOB NOT NULL,
    first_s REAL NOT NULL,
    last_s REAL,
    fate TEXT NOT NULL DEFAULT 'open',
    watched_s REAL,
    applied_s REAL,
    measured TEXT NOT NULL DEFAULT '{}'
);
CREATE INDEX recommendations_of_engine ON recommendations (engine_id, fate);

CREATE TABLE configs (
    id INTEGER PRIMARY KEY,
    engine_id INTEGER NOT NULL,
    t_s REAL NOT NULL,
    labels TEXT NOT NULL,
    started_s REAL,
    restart TEXT NOT NULL
);
CREATE INDEX configs_of_engine ON configs (engine_id, id);
