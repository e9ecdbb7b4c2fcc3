"""The published systems' headline claims against what we measure: one file each, behind `claims.Reproduction`."""
