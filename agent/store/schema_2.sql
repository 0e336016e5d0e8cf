-- Allows chains of documents, and adds `exact`: whether a document is valid for every scrape until the
-- next document. In documents of earlier versions the evidence may be minutes old.
ALTER TABLE documents ADD COLUMN exact INTEGER NOT NULL DEFAULT 0;
