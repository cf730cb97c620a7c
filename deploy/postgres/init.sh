#!/bin/sh
# Run once by the image, as superuser, when the data folder is new: PostGIS and a role without privileges that owns the
# platform's database. Its password comes from the environment and goes to psql as a variable, never as text of SQL.
set -eu

psql -v ON_ERROR_STOP=1 -U postgres -d postgres -v password="$GEO_ASSETS_DATABASE_PASSWORD" <<'SQL'
CREATE ROLE geo_assets LOGIN PASSWORD :'password';
CREATE DATABASE geo_assets OWNER geo_assets;
SQL

psql -v ON_ERROR_STOP=1 -U postgres -d geo_assets <<'SQL'
CREATE EXTENSION IF NOT EXISTS postgis;
-- Dagster's own tables; geo-assets makes the schema of its tables itself.
CREATE SCHEMA IF NOT EXISTS geo_assets_dagster AUTHORIZATION geo_assets;
SQL
