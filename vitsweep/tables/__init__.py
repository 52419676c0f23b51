"""From records to tables: DataFrame in, DataFrame out; only `load` reads files. No torch."""
