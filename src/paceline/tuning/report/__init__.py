"""The results of a study: table, page, CSV and files of Optuna."""
