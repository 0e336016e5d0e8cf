"""The documentation; the pages about causes and rules and the glossary ship with the package."""
