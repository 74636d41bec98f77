-- Run once by the Postgres image, on an empty data folder. Prefect has a database of its own on the same server.
CREATE DATABASE prefect;
