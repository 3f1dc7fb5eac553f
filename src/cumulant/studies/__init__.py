"""Small reproducible experiments from the literature. Import the study you want; nothing heavy is loaded here."""
